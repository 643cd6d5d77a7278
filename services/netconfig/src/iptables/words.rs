//! A rule's text as words and back, as `iptables-save` writes and `iptables-restore` reads them
//! (`xtables_save_string` and `add_param_to_argv` of iptables): white space between, double quotes around what has any,
//! and in these a backslash before a quote or a backslash.

/// The words of a line. `None` where a quote is not closed.
pub(super) fn split(line: &str) -> Option<Vec<String>> {
    let (mut words, mut word) = (Vec::new(), None::<String>);
    let (mut quoted, mut escaped) = (false, false);
    for c in line.chars() {
        match c {
            _ if escaped => {
                word.get_or_insert_default().push(c);
                escaped = false;
            }
            '\\' if quoted => escaped = true,
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            ' ' | '\t' if !quoted => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    (!quoted && !escaped).then_some(words)
}

/// Words as a line.
pub(super) fn join(words: &[String]) -> String {
    let words: Vec<_> = words.iter().map(|word| quote(word)).collect();
    words.join(" ")
}

/// One word.
pub(super) fn quote(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\'' | '\\');
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    let mut quoted = String::from('"');
    for c in word.chars() {
        if matches!(c, '"' | '\'' | '\\') {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_split_as_iptables_does_it() {
        let line = r#"-m comment --comment "a\'b\"c\\d e"  -j X ! "" end"#;
        let wanted = [
            "-m",
            "comment",
            "--comment",
            r#"a'b"c\d e"#,
            "-j",
            "X",
            "!",
            "",
            "end",
        ];
        assert_eq!(split(line).unwrap(), wanted);
    }

    #[test]
    fn what_is_joined_is_split_into_the_same() {
        let words = ["inpod schema=2", "", r#"it's "so" \ "#, "!", "-j", "x\ty"];
        let words = words.map(str::to_owned);
        assert_eq!(split(&join(&words)).unwrap(), words);
    }

    #[test]
    fn a_quote_that_is_not_closed_is_no_line() {
        assert_eq!(split(r#"--comment "a"#), None);
        assert_eq!(split(r#"--comment "a\"#), None);
    }
}
