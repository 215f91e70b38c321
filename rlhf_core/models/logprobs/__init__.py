"""Computes log-probs of tokens, whole distributions and heads in float32."""
