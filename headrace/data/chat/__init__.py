"""Conversations: chat templates, turns, prompts, and which words of them are trained."""
