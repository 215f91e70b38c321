"""Starts runs of deployments on new feedback and on requests over HTTP."""
