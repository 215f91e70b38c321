"""A small recipe, and the fixture that writes it into a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Write = Callable[..., Path]
TEXT = """
name: tiny
base_model: models/base
stages:
  sft: {data: {sources: train.jsonl}, learning_rate: 1e-3}
  reward_model: {data: {sources: pairs.jsonl}}
  ppo: {prompts: {sources: prompts.jsonl}, actor_learning_rate: 5e-7}
  evaluation: {models: [ppo], questions: {path: q.jsonl}, judges: [{kind: rule}, {kind: reward}]}
"""
