"""The Responses API: its exchange, and the items that conversations keep."""
