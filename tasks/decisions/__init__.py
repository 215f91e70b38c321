"""Decides about finished stages: gates, a person's approval, the champion."""
