"""The routes beside the data plane: state, explanation, probes, admin."""
