"""The PDFs of requests, read in processes of their own with bounded time and memory."""
