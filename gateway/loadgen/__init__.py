"""A load generator for OpenAI endpoints: what is asked, when, what came back, and what it says."""
