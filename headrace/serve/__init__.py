"""A server of OpenAI's API: requests become seats of one generation's passes."""
