// Preact with tagged templates, which need no build. A value in ${} becomes text or a property, never markup.
import { h } from './vendor/preact.mjs'
import htm from './vendor/htm.mjs'

export const html = htm.bind(h)
