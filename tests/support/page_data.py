# SPDX-License-Identifier: Apache-2.0
"""The data in a page of q2compile."""

import base64
import json
import re
import zlib


def data_of(page):
    """The data that the page's scripts read, as Python values."""
    packed = re.search(r'<script type="text/plain" id="data">(.*?)</script>', page)[1]
    return json.loads(zlib.decompress(base64.b64decode(packed)))
