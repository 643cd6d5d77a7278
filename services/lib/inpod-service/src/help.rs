//! Wraps help texts at 80 columns.
//!
//! clap wraps only with its feature `wrap_help`, which adds a dependency that asks for the terminal's width; the log of
//! a container has none.

const MAX_COLUMNS: usize = 80;

/// Wraps a help text that clap rendered with `next_line_help`. Continuation lines keep the indentation of their line.
pub fn wrap(text: &str) -> String {
    let mut wrapped = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        if line.trim_end().chars().count() <= MAX_COLUMNS {
            wrapped += line;
            continue;
        }
        let indent = line.len() - line.trim_start().len();
        let mut column = 0;
        for word in line.split_whitespace() {
            let is_long = indent + word.chars().count() > MAX_COLUMNS;
            for (at, part) in parts(word, is_long).into_iter().enumerate() {
                let space = usize::from(at == 0 && column > 0);
                let length = part.chars().count();
                if column > indent && column + space + length > MAX_COLUMNS {
                    wrapped.push('\n');
                    column = 0;
                }
                if column == 0 {
                    wrapped += &" ".repeat(indent);
                    column = indent;
                } else if space == 1 {
                    wrapped.push(' ');
                    column += 1;
                }
                wrapped += part;
                column += length;
            }
        }
        wrapped.push('\n');
    }
    wrapped
}

/// Splits a word that is longer than a line, such as the JSON of a default, where JSON permits a line break.
fn parts(word: &str, is_long: bool) -> Vec<&str> {
    if is_long {
        word.split_inclusive([',', ':', '{']).collect()
    } else {
        vec![word]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_with_their_indentation_and_short_ones_stay() {
        let long = format!("      {}end\n", "word ".repeat(20));
        let text = format!("Usage:  x\n\n{long}");
        let wrapped = wrap(&text);
        assert!(wrapped.starts_with("Usage:  x\n\n      word"), "{wrapped}");
        assert!(
            wrapped.ends_with("\n      word word word word word end\n"),
            "{wrapped}"
        );
        assert!(wrapped.lines().all(|line| line.len() <= MAX_COLUMNS));
        assert_eq!(
            wrap(&format!("  {}", "x".repeat(100))),
            format!("  {}\n", "x".repeat(100))
        );
        let json = format!("  [default: {}]", "{\"key\":\"value\"},".repeat(10));
        let wrapped = wrap(&json);
        assert!(
            wrapped.lines().all(|line| line.len() <= MAX_COLUMNS),
            "{wrapped}"
        );
        assert_eq!(wrapped.replace("\n  ", "").trim(), json.trim());
    }
}
