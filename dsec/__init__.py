"""DSec: sandbox infrastructure for agentic reinforcement learning."""
