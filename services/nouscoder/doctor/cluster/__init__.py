"""The checks of a Kubernetes cluster: facts, the client that reads them, and a trial with pods."""
