"""A load generator for OpenAI endpoints: what is asked, when, what came back, and what it says."""


class MeasurementError(Exception):
    """Nothing can be measured; the message is one sentence that says what to change."""
