# SPDX-License-Identifier: Apache-2.0
"""Images that a client uploads once, and that its requests then name: `/v1/files` and `file_id`.

`store` keeps files in a directory or in what else fsspec opens, such as S3. `endpoints` has the HTTP endpoints.
`references` finds the ids in a request, and `middleware` puts the images in their places. On where the setting `files`
says where they are kept. API server process; imports no vLLM.
"""
