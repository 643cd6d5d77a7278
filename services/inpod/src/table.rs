use std::iter::zip;

use inpod_service::escape_controls;

const GAP: &str = "  ";

/// A text table, whose rows all have the same number of cells.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    widths: Vec<usize>,
    rows: Vec<Vec<String>>,
}

impl Table {
    pub(crate) fn new(header: &[&str]) -> Self {
        let mut table = Self {
            widths: vec![0; header.len()],
            rows: Vec::new(),
        };
        table.push(header.iter().map(|cell| (*cell).to_owned()));
        table
    }

    /// Adds a row of as many cells as the header has. Control characters are escaped, and an empty or missing cell
    /// becomes a dash.
    pub(crate) fn push(&mut self, row: impl IntoIterator<Item = String>) {
        let mut row: Vec<_> = row.into_iter().map(|cell| shown(&cell)).collect();
        row.resize(self.widths.len(), shown(""));
        for (width, cell) in zip(&mut self.widths, &row) {
            *width = (*width).max(cell.chars().count());
        }
        self.rows.push(row);
    }

    /// Renders and removes all rows. The widths stay, so that rows added later align with the printed ones.
    pub(crate) fn take(&mut self) -> String {
        let rows = std::mem::take(&mut self.rows);
        rows.iter().map(|row| self.render(row) + "\n").collect()
    }

    fn render(&self, row: &[String]) -> String {
        let cells = zip(row, &self.widths).map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join(GAP);
        line.trim_end().to_owned()
    }
}

fn shown(cell: &str) -> String {
    if cell.is_empty() {
        return "-".to_owned();
    }
    escape_controls(cell)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: [&str; 2]) -> Vec<String> {
        cells.map(str::to_owned).into()
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_lines_end_where_their_text_does() {
        let mut table = Table::new(&["NAME", "STATE"]);
        table.push(row(["a-long-name", "out"]));
        table.push(row(["b", ""]));
        let text = "NAME         STATE\na-long-name  out\nb            -\n";
        assert_eq!(table.take(), text);
        table.push(row(["c", "enrolled"]));
        assert_eq!(table.take(), "c            enrolled\n");
    }

    #[test]
    fn what_others_wrote_moves_no_cursor() {
        let mut table = Table::new(&["NAME", "STATE"]);
        table.push(row(["\u{1b}[2J\nx", "\u{202e}out"]));
        assert!(table.take().contains("\\u{1b}[2J\\nx  \\u{202e}out"));
    }
}
