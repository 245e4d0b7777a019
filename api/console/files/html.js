// Preact without a build: tagged templates. Whatever stands in ${} is text or a property, never markup.
import { h } from './vendor/preact.mjs'
import htm from './vendor/htm.mjs'

export const html = htm.bind(h)
