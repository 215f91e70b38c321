"""Commands for the runs and stages in an artifacts folder."""
