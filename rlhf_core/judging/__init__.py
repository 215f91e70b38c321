"""Asks chat models for verdicts and reads them: for the judges of evaluations, and for judges that reward."""
