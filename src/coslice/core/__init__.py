"""Pure decisions: events in, effects out. No clock, no IO, no asyncio, no logging, no random numbers."""
