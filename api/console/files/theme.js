// Sets the theme before anything is painted, so that the page does not flash in the other theme. This is a separate script, because the
// Content-Security-Policy forbids inline scripts.
const chosen = localStorage.getItem('proofline-theme')
if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.theme = chosen
