"""What every HTTP service shares: the listener, bodies within limits, API keys, requests from browsers, TLS."""
