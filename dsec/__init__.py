"""DSec: sandbox infrastructure for agentic reinforcement learning."""

__version__ = "0.1.0"
