"""What generations are for: jobs of prompts, held-out loss, rollouts."""
