"""How things are seen: clocks, memory, hardware and fresh processes."""
