"""The report as one HTML page: the data in it, and the files it is put together from. Its frame
(`assemble`, static/base.css, static/base.js) serves other pages too. May import what report may.
"""
