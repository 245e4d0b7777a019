// Where else to look. With a key, links cannot lead there, as they bring none: the page fetches and shows the text.
import { html } from './html.js'

export const Links = ({ known, act }) => {
  const flower = `http://${location.hostname}:5555`
  const open = path => () => act.open(path).catch(error => act.change({ jobProblem: error.message }))
  return html`<footer>
    <nav aria-label="Elsewhere">
      <ul>
        <li><a href=${flower} rel="noreferrer">Flower</a> <small>where proofline flower runs</small></li>
        ${known.hasKey
          ? html`<li><button onClick=${open('metrics')}>Metrics</button></li>
              <li><button onClick=${open('openapi.json')}>API reference (OpenAPI)</button></li>`
          : html`<li><a href="metrics">Metrics</a></li>
              <li><a href="docs">API reference</a> <small>needs the network; <a href="openapi.json">OpenAPI</a> does not</small></li>`}
      </ul>
    </nav>
  </footer>`
}
