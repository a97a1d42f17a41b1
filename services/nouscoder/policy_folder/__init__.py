"""What a policy folder (a Hugging Face model folder) holds, as sampling and training read it."""
