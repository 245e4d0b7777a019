// Before anything is painted: a page must not flash in the other theme. A script of its own, as inline ones are not allowed.
const chosen = localStorage.getItem('proofline-theme')
if (chosen === 'light' || chosen === 'dark') document.documentElement.dataset.theme = chosen
