"""What a Kubernetes cluster can give: facts, the client that reads them, and a trial with pods of our own."""
