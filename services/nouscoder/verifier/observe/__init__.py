"""What the verifier tells about itself: metrics, audit log, traces."""
