"""The grading API over REST and gRPC: records, validation of requests, streaming, the playground page."""
