"""State shared beside messages: limits, policy, durable calls, models, reports of stages."""
