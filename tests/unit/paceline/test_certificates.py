"""Certificate authorities that gateways and workers trust when they connect to each other."""

from paceline.http import certificate_authorities

COMPANY_CA = """\
-----BEGIN CERTIFICATE-----
MIIBnzCCAUWgAwIBAgIUFoefNhWsu2H2mlS8tv1iro7ozvcwCgYIKoZIzj0EAwIw
JDEiMCAGA1UEAwwZQSBjb21wYW55J3Mgb3duIGF1dGhvcml0eTAgFw0yNjExMjIy
MjM1MDVaGA8yMTI2MTAyOTIyMzUwNVowJDEiMCAGA1UEAwwZQSBjb21wYW55J3Mg
b3duIGF1dGhvcml0eTBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABKS6yLwUFL0s
seaKAVRH5r61OjhO4+Wbl2jmHcTve4Ap8cG0ykEIEdQzbnVBSZhnCBXezZxan5Jq
d+IVROqeeCOjUzBRMB0GA1UdDgQWBBThVw9UhvJ3uf3iBoDK6VCO8n08EzAfBgNV
HSMEGDAWgBThVw9UhvJ3uf3iBoDK6VCO8n08EzAPBgNVHRMBAf8EBTADAQH/MAoG
CCqGSM49BAMCA0gAMEUCIQDDDHRacRcUomX2DvFMdnp7iYnEQXTeS3Z4+SoJz8oc
+QIgetMAehJVUUy5PJHGovwHy/MSBeruOl8qWQGfP1a3MAs=
-----END CERTIFICATE-----
"""


def test_clients_trust_the_systems_authorities(tmp_path, monkeypatch) -> None:
    (tmp_path / "ca.pem").write_text(COMPANY_CA)
    monkeypatch.delenv("SSL_CERT_DIR")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert "A company's own authority" in str(certificate_authorities.__wrapped__().get_ca_certs())
