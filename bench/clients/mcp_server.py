"""An MCP server on standard input and output, with one tool that an agent has to search for."""

import json
import sys
from typing import Any

TOOL = "find_heron"
NEST = "The heron nests behind the mill."
_DESCRIPTION = "Tell where the heron nests."


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    match asked["method"]:
        case "initialize":
            version = asked["params"]["protocolVersion"]
            about = {"name": "notes", "version": "1"}
            return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            form = {"type": "object", "properties": {}}
            return {"tools": [{"name": TOOL, "description": _DESCRIPTION, "inputSchema": form}]}
        case "tools/call":
            return {"content": [{"type": "text", "text": NEST}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            answer = {"jsonrpc": "2.0", "id": asked["id"], "result": _answer(asked)}
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
