"""What proposes tokens: one protocol, several drafters."""
