# SPDX-License-Identifier: Apache-2.0
"""`make chaos`: a server under load whose stores are damaged and taken away, and which is killed."""
