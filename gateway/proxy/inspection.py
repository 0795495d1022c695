"""The inspection of a request, and the reading of its documents before it."""

from __future__ import annotations

from gateway import errors
from gateway.assembly import Gateway
from gateway.protocols import WireFormat
from gateway.protocols.openai import readable_media
from gateway.types import Inspected
from policies.document import PolicyDocument


async def inspect(
    gateway: Gateway, wire_format: WireFormat, raw: bytes, policy: PolicyDocument, client: str
) -> Inspected:
    """Parse a body, read its documents, and inspect it; raise a `RequestRefused`.

    The size of the body and the key of the client have been checked.
    """
    fleet = gateway.fleet.view()
    model, pdfs = wire_format.pdfs(raw)
    if not pdfs:
        return wire_format.inspect(raw, policy, fleet)
    pictures = "image" in readable_media(model, policy, fleet)
    documents = await gateway.documents.read(client, pdfs, pictures=pictures)
    try:
        return wire_format.inspect(raw, policy, gateway.fleet.view(), documents)
    except errors.FieldInvalid:
        if not any(document.pages for document in documents.values()):
            raise
        # The pages may be too many beside the pictures of the request itself.
        texts = {pdf: document._replace(pages=()) for pdf, document in documents.items()}
        return wire_format.inspect(raw, policy, gateway.fleet.view(), texts)
