"""Plain decoding against speculative decoding, on a user's own target, head and prompts."""
