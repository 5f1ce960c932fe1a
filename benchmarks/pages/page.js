// SPDX-License-Identifier: Apache-2.0
// What the pages share: words that are the same in every run, and which step of an agent's work a page shows.
"use strict";
const STEP = Number(new URLSearchParams(location.search).get("step"));
const WORDS = ("the server answers with a list of orders that were paid in march and sent to the harbour before noon " +
  "each row names a customer a price and the clerk who signed it while totals below are kept in another table so a " +
  "reader may compare both without opening the archive again").split(" ");

// Numbers from 0 to below 2^32, the same for the same seed.
function* numbers(seed) {
  for (let state = (seed + 1) * 2654435761 >>> 0; ; ) {
    state ^= state << 13; state ^= state >>> 17; state ^= state << 5;
    yield state >>>= 0;
  }
}

// So many words, the same for the same seed.
function words(count, seed) {
  const chance = numbers(seed);
  return Array.from({ length: count }, () => WORDS[chance.next().value % WORDS.length]).join(" ");
}

// A new element of `parent`.
function put(parent, tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  parent.append(made);
  return made;
}
