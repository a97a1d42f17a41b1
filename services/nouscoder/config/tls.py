"""Encryption between the services of a run."""

from __future__ import annotations

from pydantic import Field, model_validator

from nouscoder.config.base import InputFile, Section


class MutualTlsSection(Section):
    """Mutual TLS between broker, generation, learner and their clients.

    The verifier's server uses verifier.tls instead. Either all three files are set, or none.
    """

    certificate: InputFile = Field("", description="PEM file of this process's certificate chain; empty turns TLS off")
    key: InputFile = Field("", description="PEM file of its private key")
    ca: InputFile = Field("", description="PEM file of the authority that signed the certificates of all services")

    @model_validator(mode="after")
    def _all(self) -> MutualTlsSection:
        if len({bool(self.certificate), bool(self.key), bool(self.ca)}) > 1:
            raise ValueError("give certificate, key and ca together")
        return self
