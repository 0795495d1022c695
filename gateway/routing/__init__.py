"""Pure routing decisions: select, cost, prefix affinity, replay."""
