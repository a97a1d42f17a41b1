"""An HTTP API in OpenAI's form that samples from the policy in use, for people and evaluations."""
