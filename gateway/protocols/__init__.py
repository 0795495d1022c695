"""Wire formats: one module each; `openai` has the format that the others change."""

from collections.abc import Mapping

from gateway.protocols.cohere import COHERE_RERANK
from gateway.protocols.messages import MESSAGES_PATH
from gateway.protocols.openai import CHAT, COMPLETIONS, EMBEDDINGS, RERANK, WireFormat
from gateway.protocols.responses import RESPONSES_PATH
from paceline.request.wires import WIRE_OF

WIRE_FORMATS: Mapping[str, WireFormat] = {
    **{WIRE_OF[one.endpoint]: one for one in (CHAT, COMPLETIONS, EMBEDDINGS, RERANK)},
    "/v2/rerank": COHERE_RERANK,
}
"""By the path at which clients use them."""
PROXY_PATHS = (*WIRE_FORMATS, MESSAGES_PATH, RESPONSES_PATH)
"""The paths of the data plane; requests to the last two have a wire format of their own each."""
