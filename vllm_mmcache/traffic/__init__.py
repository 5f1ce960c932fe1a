# SPDX-License-Identifier: Apache-2.0
"""What a log of requests says: which images come again, and what caches of them would save.

`logs` reads files, `requests` finds texts and images in one request and `records` in what a server has recorded,
`models` says how many tokens an image has, `estimate` plays the requests through caches, `report` puts the outcome into
words, and `page` makes a page of them. A short-lived process; imports neither vLLM nor torch. Of a request nothing is
kept but digests and sizes.
"""
