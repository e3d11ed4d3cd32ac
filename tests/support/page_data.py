# SPDX-License-Identifier: Apache-2.0
"""The data in a page of q2compile."""

import json
import re


def data_of(page):
    """The data that the page's scripts read, as Python values."""
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]
    )
