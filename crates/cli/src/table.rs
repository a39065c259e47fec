//! Text tables in the style of `kubectl get`.

/// A table with columns as wide as their widest cell, and three spaces between columns.
pub(crate) struct Table {
    wide: bool,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Starts a table with these column headings.
    pub(crate) fn new(headings: &[&str]) -> Self {
        Self { wide: false, rows: vec![headings.iter().map(|&cell| cell.to_owned()).collect()] }
    }

    /// Adds columns if `wide` is true. If `wide` is false, [`Table::add_wide_row`] drops the cells
    /// of these columns.
    pub(crate) fn with_wide_columns(mut self, wide: bool, headings: &[&str]) -> Self {
        self.wide = wide;
        if let Some(first) = self.rows.first_mut().filter(|_| wide) {
            first.extend(headings.iter().map(|&cell| cell.to_owned()));
        }
        self
    }

    /// Adds a row. An empty cell is shown as `-`.
    pub(crate) fn add_row(&mut self, cells: &[&str]) {
        self.add_wide_row(cells, &[]);
    }

    /// Adds a row. If the table is not wide, drops the cells in `wide`.
    pub(crate) fn add_wide_row(&mut self, cells: &[&str], wide: &[&str]) {
        let wide = if self.wide { wide } else { &[] };
        let cell = |&cell: &&str| if cell.is_empty() { "-".to_owned() } else { cell.to_owned() };
        self.rows.push(cells.iter().chain(wide).map(cell).collect());
    }

    /// Renders the table without trailing spaces.
    pub(crate) fn render(&self) -> String {
        let mut widths: Vec<usize> = Vec::new();
        for row in &self.rows {
            widths.resize(widths.len().max(row.len()), 0);
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut text = String::new();
        for row in &self.rows {
            let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, &width)| format!("{cell:width$}")).collect();
            text.push_str(cells.join("   ").trim_end());
            text.push('\n');
        }
        text
    }
}
