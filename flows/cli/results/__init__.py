"""Commands on the runs and stages in an artifacts folder."""
