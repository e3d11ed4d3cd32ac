# SPDX-License-Identifier: Apache-2.0
"""The data in a page of q2compile."""

import base64
import json
import re
import zlib


def data_of(page):
    """The data that the page's scripts read, as Python values."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    )


def unpacked(text):
    """The text that `document.packed` packed."""
    return zlib.decompress(base64.b64decode(text)).decode()
