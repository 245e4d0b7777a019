// Links to other pages. A link cannot send a key, so with a key the page fetches and shows the text.
import { html } from './html.js'

const GRAFANA = 'proofline-grafana'

/** Returns the address of Grafana that this browser stores, or null. */
export const grafana = () => localStorage.getItem(GRAFANA)

export function keepGrafana(url) {
  if (!url) return localStorage.removeItem(GRAFANA)
  if (!/^https?:\/\//.test(url)) throw new Error('The address must begin with http:// or https://.')
  localStorage.setItem(GRAFANA, url)
}

export const Links = ({ known, act }) => {
  const flower = `http://${location.hostname}:5555`
  const open = path => () => act.open(path).catch(error => act.change({ jobProblem: error.message }))
  return html`<footer>
    <nav aria-label="Elsewhere">
      <ul>
        ${known.grafana && html`<li><a href=${known.grafana} rel="noreferrer">Grafana</a></li>`}
        <li><button class="link" onClick=${() => act.change({ dialog: 'grafana' })}>${known.grafana ? 'Change the link to Grafana …' : 'Link to Grafana …'}</button></li>
        <li><a href=${flower} rel="noreferrer">Flower</a> <small>if proofline flower runs</small></li>
        ${known.hasKey
          ? html`<li><button onClick=${open('metrics')}>Metrics</button></li>
              <li><button onClick=${open('openapi.json')}>API reference (OpenAPI)</button></li>`
          : html`<li><a href="metrics">Metrics</a></li>
              <li><a href="docs">API reference</a></li>`}
      </ul>
    </nav>
  </footer>`
}
