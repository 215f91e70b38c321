"""Asks chat models for verdicts and reads their replies, for judges in evaluations and for judges that give
rewards."""
