"""Workers: registry, health, circuit breaker, and the scheduler that gives requests their slots."""
