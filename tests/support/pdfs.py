"""Small PDF files: with texts, and those that a stranger makes to harm who reads them."""

import base64
import zlib
from io import BytesIO

from pypdf import PdfReader, PdfWriter


def pdf(*texts: str) -> bytes:
    """Return a document with one page for each text."""
    return _pages(*(f"BT /F1 24 Tf 72 720 Td ({text}) Tj ET".encode() for text in texts))


def encrypted_pdf(text: str, password: str) -> bytes:
    """Return a document that opens with this password."""
    writer = PdfWriter(clone_from=PdfReader(BytesIO(pdf(text))))
    writer.encrypt(password, algorithm="AES-256")
    output = BytesIO()
    writer.write(output)
    return output.getvalue()


def endless_pdf(text: str = "Hello") -> bytes:
    """Return a readable page, then one that draws a form ten times that draws one ten times ..."""
    first = f"BT /F1 24 Tf 72 720 Td ({text}) Tj ET".encode()
    return _pages(first, b"/X0 Do " * 10, forms=12)


def inflated_pdf() -> bytes:
    """Return a page of two megabytes that unpacks to two gigabytes, each a repeated block."""
    packer = zlib.compressobj(9)
    first, again = (
        packer.compress(b" " * (1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2)
    )
    packed = first + 2047 * again + packer.flush()
    return _pages(packed, filtered=b" /Filter [/FlateDecode]")


def base64_pdf(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _pages(*contents: bytes, forms: int = 0, filtered: bytes = b"") -> bytes:
    font = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    first_form = 4
    named = b" ".join(b"/X%d %d 0 R" % (n, first_form + n) for n in range(forms))
    resources = b"<< /Font << /F1 3 0 R >> /XObject << %s >> >>" % named
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b"", font]
    for number in range(forms):
        drawn = b"/X%d Do " % (number + 1) * 10 if number + 1 < forms else b"0 0 9 9 re f"
        head = b"/Type /XObject /Subtype /Form /BBox [0 0 612 792] /Resources " + resources
        objects.append(_stream(drawn, head))
    kids = []
    for content in contents:
        kids.append(b"%d 0 R" % (len(objects) + 1))
        page = b"<< /Type /Page /Parent 2 0 R /Resources %s /Contents %d 0 R >>"
        objects += [page % (resources, len(objects) + 2), _stream(content, filtered)]
    objects[1] = b"<< /Type /Pages /MediaBox [0 0 612 792] /Kids [%s] /Count %d >>" % (
        b" ".join(kids),
        len(kids),
    )
    file = bytearray(b"%PDF-1.7\n")
    places = []
    for number, one in enumerate(objects, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    file += b"".join(b"%010d 00000 n \n" % place for place in places)
    file += b"trailer << /Size %d /Root 1 0 R >>\n" % (len(objects) + 1)
    return bytes(file + b"startxref\n%d\n%%%%EOF\n" % table)


def _stream(content: bytes, head: bytes) -> bytes:
    return b"<< %s /Length %d >>\nstream\n%s\nendstream" % (head, len(content), content)
