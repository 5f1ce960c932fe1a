# SPDX-License-Identifier: Apache-2.0
"""A tiny Qwen3-VL that was trained to see: it names colour and shape in pictures and says whether two are the same.

`pictures` draws, `prompts` asks and knows the right answer, `train` made the weights that lie here, `measured.json` has
how often they are right. What a wrong picture does to this model can be read: it writes the wrong words. Importing this
package loads nothing.
"""
